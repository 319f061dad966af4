"""Conversations that change from epoch to epoch: MiniMind's random system prompts and empty think blocks."""

import random
from dataclasses import dataclass, replace

from dataset.conversations import SYSTEM, Conversation, Turn

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

    minimind-3 has 0.2 and 0.2, its predecessor 0.2 and 0.05. The empty block teaches a model that also reasons to
    answer at once where the prompt closes the block for it.
    """

    seed: int = 0
    system_prompt_share: float = 0.0
    empty_think_share: float = 0.0

    def of(self, conversation: Conversation, epoch: int, index: int) -> Conversation:
        """Return a conversation as it is in this epoch: a function of seed, epoch and index, on any rank or worker.

        One with tools or a system turn keeps what it has; answers with reasoning keep it.
        """
        draw = random.Random(f"{self.seed} {epoch} {index}")
        system, prompt, empty = draw.random(), draw.choice(SYSTEM_PROMPTS), draw.random()
        turns = conversation.turns
        if system < self.system_prompt_share and not conversation.tools and turns[0].role != SYSTEM:
            turns = (Turn(SYSTEM, prompt), *turns)
        return replace(conversation, turns=turns, empty_think=empty < self.empty_think_share)
