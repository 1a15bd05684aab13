"""From conversations to tokens: rows of dialogues, chat templates, and a cache of examples."""
