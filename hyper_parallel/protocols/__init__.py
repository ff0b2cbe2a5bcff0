"""What a model, its parameters and its plan look like to the rest of the house."""
