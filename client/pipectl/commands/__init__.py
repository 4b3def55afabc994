"""One module per command. Each parses, calls pipectl.api, prints through pipectl.output."""
