"""The small process between the owner and its PostgreSQL server.

It is the server's parent. It runs in a session of its own, so that Ctrl-C reaches the owner only, reads
commands from a pipe whose other end only the owner holds, and stops the server and removes a temporary folder
as soon as the pipe closes or the owner is gone, however it died.

It is started by path with nothing but the standard library, so these modules import each other relatively and
nothing else of the package.
"""
