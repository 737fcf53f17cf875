"""Other people's frameworks, one file each; nobody imports them."""
