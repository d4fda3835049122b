"""The pages for people: who may see them, what is on them, and what they do. Served on the control port only."""
