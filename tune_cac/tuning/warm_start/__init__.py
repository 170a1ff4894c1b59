"""What a search learns from its baseline before it asks for more trials."""
