"""This rank among the others, and what they tell each other in the background."""
