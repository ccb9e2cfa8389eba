"""An application whose tests run inside of Django; the tests beside this folder start them."""
