"""`ampatch tables`: `content` collects the rows, `formats` writes them."""
