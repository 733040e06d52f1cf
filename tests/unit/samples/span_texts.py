"""The inverse of span corruption, so that a test sees that no token is lost."""

import numpy as np

from zerokara.samples.objective import Ids


def merged(encoder_input: Ids, target: Ids, sentinels: Ids, end_id: int) -> Ids:
    """The raw text of one sample, from its encoder input and decoder target; one dimension each."""
    place_of = {int(sentinel): place for place, sentinel in enumerate(sentinels)}
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in target[:-1].tolist():
        if token in place_of:
            current = spans.setdefault(place_of[token], [])
        else:
            current.append(token)
    assert encoder_input[-1] == target[-1] == end_id, "both end with it"
    text: list[int] = []
    for token in encoder_input[:-1].tolist():
        text.extend(spans[place_of[token]] if token in place_of else [token])
    return np.array(text, dtype=np.int64)
