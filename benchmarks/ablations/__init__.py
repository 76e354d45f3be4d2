"""What each part of a method is worth."""
