"""Policy gradient tasks: PPO, GRPO and their variants, from rollouts to updates."""
