"""Conversations that change from epoch to epoch: MiniMind's random system prompts and empty think blocks."""

import random
from dataclasses import dataclass

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a knowledgeable assistant. Answer clearly.",
    "You are a careful assistant; say so when you do not know.",
    "You are a friendly assistant who answers briefly.",
    "Help the user with questions of any kind.",
    "你是一个乐于助人的助手。",
    "你是一位知识丰富的助手，请回答得清楚易懂。",
    "你是一位认真的助手，不知道的事情请直接说明。",
    "你是一位友好的助手，回答简洁。",
    "请帮助用户解答各种问题。",
)


@dataclass(frozen=True)
class Variation:
    """Shares of the conversations, 0 to 1, that get a system prompt, and an empty think block in every answer.

    One with tools or a system turn keeps what it has, and so do answers with reasoning. minimind-3 has 0.2 and 0.2, its
    predecessor 0.2 and 0.05. The empty block teaches a model that also reasons to answer at once where the prompt
    closes the block for it.
    """

    seed: int = 0
    system_prompt_share: float = 0.0
    empty_think_share: float = 0.0

    def draw(self, epoch: int, index: int) -> tuple[str | None, bool]:
        """Which system prompt, if any, and whether the empty block, in this epoch: the same on any rank or worker."""
        draw = random.Random(f"{self.seed} {epoch} {index}")
        system, prompt, empty = draw.random(), draw.choice(SYSTEM_PROMPTS), draw.random()
        return prompt if system < self.system_prompt_share else None, empty < self.empty_think_share
