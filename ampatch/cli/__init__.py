"""The command `ampatch`: one file per subcommand."""
