"""The models beside the policy: loading, reference model, value head, rewards, and their ranks."""
