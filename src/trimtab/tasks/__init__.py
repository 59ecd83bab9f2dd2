"""What to solve: rows, prompts, rewards and answer verification."""
