"""Which jobs exist: one small file for each run directory, in the user's state folder and, if the
site has one, in a folder that all users share."""
