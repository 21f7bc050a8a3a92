"""How fast awa is, measured so that the figures can be trusted; see README.md."""
