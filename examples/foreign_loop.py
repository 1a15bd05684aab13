"""A training loop that is not Kitforge's plays a game against `kitforge serve`, tokens in and tokens out.

The loop keeps every token as the server drew it, with its log-probability, and trains on both: REINFORCE, whose loss is
checked against the log-probabilities that the model itself gives the same tokens.
"""

import json
import subprocess
import sys
import urllib.request

import torch

from kitforge import Trainer

PLAYERS, TURNS = 6, 2
demos = [{"prompt": "Say a letter: ", "completion": word} for word in ("sea", "hill", "town", "wood")] * 4
run = Trainer("sft", "llama_tiny", demos, options={"trainer.max_steps": 10}).train()
model, encode = run.model.eval(), run.processor.encode


def generate(url: str, tokens: list[int], seed: int) -> tuple[list[int], list[float]]:
    """Tokens behind these, and the log-probability that each was drawn with."""
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": seed}
    body = json.dumps({"token_ids": tokens, "sampling_params": sampling}).encode()
    asked = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def play(url: str, player: int) -> tuple[list[int], list[bool], list[float], float]:
    """An episode: its tokens, which of them the policy drew, their log-probabilities, and its return."""
    tokens, reward = encode("Say a letter: "), 0.0
    is_own = [False] * len(tokens)
    logprobs: list[float] = []
    for turn in range(TURNS):
        said, known = generate(url, tokens, seed=player * TURNS + turn)
        letters = sum(97 <= token < 123 for token in said)
        told = encode(f" {letters} letters. ")  # what the game says; the reply before it is never encoded again
        tokens, is_own = tokens + said + told, is_own + [True] * len(said) + [False] * len(told)
        logprobs, reward = logprobs + known, reward + letters
    return tokens, is_own, logprobs, reward


def teacher_forced(tokens: list[int], is_own: list[bool]) -> torch.Tensor:
    """The model's own log-probabilities of the tokens that the policy drew."""
    known = model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
    found = known.gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1))[:, 0]
    return found[torch.tensor(is_own[1:])]


def reinforce(logprobs: list[torch.Tensor], advantages: torch.Tensor) -> torch.Tensor:
    """The loss of REINFORCE, of the log-probabilities of each episode."""
    return -sum(own.sum() * each for own, each in zip(logprobs, advantages, strict=True)) / PLAYERS


command = [sys.executable, "-m", "kitforge", "serve", f"checkpoint={run.folder}", "port=0", "serve.name=tiny"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        assert server.stdout is not None
        line = next(each for each in server.stdout if "answers at" in each)
        url = line.split("answers at ")[1].split()[0]
        episodes = [play(url, player) for player in range(PLAYERS)]
    finally:
        server.terminate()

returns = torch.tensor([reward for *_, reward in episodes])
advantages = returns - returns.mean()
served = reinforce([torch.tensor(logprobs) for _, _, logprobs, _ in episodes], advantages)
own = [teacher_forced(tokens, is_own) for tokens, is_own, _, _ in episodes]
loss = reinforce(own, advantages)
furthest = max(
    float((each.detach() - torch.tensor(known)).abs().max())
    for each, (_, _, known, _) in zip(own, episodes, strict=True)
)
print(f"REINFORCE {float(served):.5f} as served, {float(loss.detach()):.5f} teacher-forced")
print(f"log-probabilities of a token differ by {furthest:.1e} at most")
assert furthest < 1e-4 and abs(float(served - loss.detach())) < 1e-3

# The server's log-probabilities are the old ones of an importance ratio: one step against them.
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loss.backward()
optimizer.step()
with torch.no_grad():
    ratios = [
        (teacher_forced(tokens, is_own) - torch.tensor(known)).sum().exp() for tokens, is_own, known, _ in episodes
    ]
gain = float(sum(ratio * each for ratio, each in zip(ratios, advantages, strict=True))) / PLAYERS
print(f"expected return by importance sampling after the step: {gain:+.5f}")
assert gain > 0
