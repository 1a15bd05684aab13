"""Alignment: supervised finetuning, reward models, preference losses, and learning from rewards."""
