"""Language models: pretraining, finetuning, evaluation and generation."""
