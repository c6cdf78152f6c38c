"""`ampatch run`: a script under mixed precision, unedited."""
