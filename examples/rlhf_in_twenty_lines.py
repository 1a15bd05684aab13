"""Three connected stages: demonstrations, preferences, rewards. Your own files, or a toy about four places:

python rlhf_in_twenty_lines.py [DEMONSTRATIONS.jsonl PAIRS.jsonl PROMPTS.jsonl]
"""

import sys

from kitforge import Trainer

ASKED = {place: f"How is the {place}? " for place in ("sea", "hill", "town", "wood")}
demos = [{"prompt": ASKED[place], "completion": word} for place in ASKED for word in ("nice", "fine", "grim", "dull")]
pairs = [
    {"prompt": ASKED[place], "chosen": c, "rejected": r}
    for place in ASKED
    for c in ("nice", "fine")
    for r in ("grim", "dull")
]
prompts = [{"prompt": ASKED[place]} for place in ASKED] * 8
if len(sys.argv) == 4:
    demos, pairs, prompts = sys.argv[1:]
short = {"data.eval_fraction": 0.1, "trainer.max_steps": 60, "optimizer.learning_rate": 0.002}
rounds = {"rl.prompts_per_rollout": 32, "rl.epochs": 2, "rollout.max_new_tokens": 8, "trainer.max_steps": 40}

policy = Trainer("sft", "llama_tiny", demos, options=short | {"data.eval_fraction": 0.0}).train()
reward = Trainer("reward", policy, pairs, options=short).train()
learner = Trainer(
    "ppo", policy, prompts, prompts, roles={"reward": reward}, options=rounds | {"optimizer.learning_rate": 3e-4}
)
before = learner.evaluate()["eval/reward"]
aligned = learner.train()
print(f"mean reward {before:.2f} before, {aligned.metrics['eval/reward']:.2f} after: {aligned.folder}/report.html")
