"""Small realistic mistakes, each applied to a copy of the checkout, to show whether the tests notice."""
