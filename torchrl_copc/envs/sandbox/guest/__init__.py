"""What runs inside the sandbox. Imports the standard library only: nothing else of this package is there."""
