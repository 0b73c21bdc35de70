"""How reports look on a terminal: colours, and lines that fit its width."""
