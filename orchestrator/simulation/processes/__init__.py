"""The processes of a simulated cluster: the real agents and leaders behind simulated seams."""
