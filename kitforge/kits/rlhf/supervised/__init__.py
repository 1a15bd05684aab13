"""Tasks over datasets: supervised fine-tuning, reward modelling and preference optimisation."""
