"""Two lines train a Wide & Deep on a click log that is made up, whose best AUC is known."""

from kitforge import Trainer

Trainer(task="recommendation").train()
