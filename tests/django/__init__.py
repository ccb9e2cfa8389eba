"""Django: a project of its own, in processes of its own."""
