"""Made-up chats for throughput measurements: lengths as in chat data (log-normal), tokens at random, one or two turns."""

from __future__ import annotations

import torch

from draftsmith.data.chat import TokenRow


def chat_rows(
    count: int, *, vocab_size: int, median: int = 220, sigma: float = 0.9, longest: int = 1024, seed: int = 0
) -> list[TokenRow]:
    """`count` rows; lengths are log-normal, cut to [24, longest]. A quarter to a half is prompt; a third has two turns.

    The defaults give a mean of about 300 tokens, a tenth of the chats above 700 and a tenth below 70.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(count, generator=generator) * sigma + torch.tensor(float(median)).log()).exp()
    rows = []
    for number, length in enumerate(lengths.clamp(24, longest).long().tolist()):
        share = 0.25 + 0.25 * float(torch.rand((), generator=generator))
        turns = 2 if number % 3 == 2 else 1
        mask: list[bool] = []
        for turn in range(turns):
            size = length // turns if turn + 1 < turns else length - len(mask)
            prompt = int(size * share)
            mask += [False] * prompt + [True] * (size - prompt)
        ids = torch.randint(3, vocab_size - 1, (length,), generator=generator).tolist()
        rows.append(TokenRow(f"chat-{number}", "chat", ids, mask))
    return rows
