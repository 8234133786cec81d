"""What it costs to keep the tokens of a long session, from the call to the checked trajectory."""
