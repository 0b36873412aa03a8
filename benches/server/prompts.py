"""Prompts by chance, of an exact number of tokens: the same seed gives the same prompts to both servers.

A prompt is token ids, drawn from those of common words. No two begin alike, so that prefix caches find nothing, unless a prefix is
shared on purpose.
"""

import random

TEXT = """
the time of year when people come to see a river and its old bridge is spring because then water runs high and every boat must wait
for men who know how to open it they work from early morning until night with little rest each family brings food bread cheese and
wine while children play on grass near stone walls that were built long before anyone living can remember one story says that a king
who lost his way through dark woods heard music followed sound found light behind trees there stood small house where woman gave him
place by fire asked nothing he promised her gold but she wanted only word that no tree would fall again upon hill above town so his
son kept promise then grand children kept too now school stands under same branches students read books about science history art
number language law machine power energy city market price road train ship island mountain desert snow rain wind summer winter autumn
doctor teacher farmer soldier friend brother sister mother father young new great public national general local social political
""".split()


async def pool(post, address):
    """Ids of the words, from a server that has the model's tokenizer."""
    text = " ".join(sorted(set(TEXT)))
    reply = await post(address, "/tokenize", {"prompt": text, "add_special_tokens": False})
    return sorted(set(reply.json()["tokens"]))


class Prompts:
    def __init__(self, ids, seed):
        if len(ids) < 64:
            raise ValueError(f"expected at least 64 ids to draw prompts from, found {len(ids)}")
        self.ids = ids
        self.random = random.Random(seed)

    def draw(self, tokens):
        return self.random.choices(self.ids, k=tokens)

    def several(self, count, tokens, prefix=()):
        return [[*prefix, *self.draw(tokens - len(prefix))] for _ in range(count)]
