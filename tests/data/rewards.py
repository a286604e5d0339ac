"""A reward whose values spread over any sample, for tests that need every step to train."""


def spread(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The mean token id, in hundreds."""
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
