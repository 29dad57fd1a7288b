"""What tests of attention share."""
