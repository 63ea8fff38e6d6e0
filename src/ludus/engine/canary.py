"""The canary: after new weights, a replica scores a fixed text, and the trainer's own numbers must come back.

Of a model that sees, the text begins with an image: what the vision part makes of it is in every number.

An update that reports success can be half an update: a tensor that was not copied, a head that is tied to the
embedding and kept its old copy. What is sampled then comes from no policy at all, and nothing else would say
so.

What it can see. The difference is the mean over the tokens of |replica - trainer|, in nats. In float32
rounding accounts for 1e-5 at most, so that a tensor that is one small optimizer step behind is seen. In
bfloat16 the two sides round differently by some hundredths: what stays behind is seen as soon as it makes a
difference of more than that, which may be some updates later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ludus.core.failures import EngineError
from ludus.core.messages import MediaSpan
from ludus.core.random import key, uniforms
from ludus.model.image_files import noise_image
from ludus.model.images import ImageProcessor

CANARY_TOKENS = 64
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.15, "float16": 0.05}
"""The largest mean difference in nats that counts as rounding."""


class CanaryError(EngineError):
    """A replica does not have the weights that it says it has."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text, and how far two computations of its log-probabilities may be apart."""

    tokens: tuple[int, ...]
    tolerance: float
    media: tuple[MediaSpan, ...] = ()

    @classmethod
    def of(
        cls, vocabulary: int, context: int | None, dtype: str, images: ImageProcessor | None = None
    ) -> Canary:
        """For a model with so many tokens, of so many in a row; `dtype` is that of its weights.

        `images` is how it is shown images. A context that no image fits into has none.
        """
        image = noise_image(0) if images is not None else None
        shown = images.tokens(image) if images is not None and image is not None else []
        if context is not None and len(shown) >= context:
            image, shown = None, []
        count = min(CANARY_TOKENS, context - len(shown)) if context else CANARY_TOKENS
        drawn = (uniforms(key("canary"), np.arange(count)) * vocabulary).astype(np.int64)
        tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
        media = () if image is None else (MediaSpan(image.sha256, 0, len(shown), image.data),)
        return cls((*shown, *drawn.tolist()), tolerance, media)

    def check(self, expected: Sequence[float], found: Sequence[float], name: str, version: int) -> float:
        """The mean difference; raises `CanaryError` where it is not what rounding leaves."""
        if len(found) != len(expected):
            raise CanaryError(
                f"{name} scored {len(found)} of the canary's {len(expected)} tokens after the update to "
                f"version {version}"
            )
        apart = [abs(a - b) for a, b in zip(expected, found, strict=True)]
        mean = sum(apart) / len(apart)
        if math.isfinite(mean) and mean <= self.tolerance:
            return mean
        raise CanaryError(
            f"{name} does not have the weights of version {version}: the log-probabilities of a fixed text are "
            f"{mean:.3g} nats from the trainer's on average (up to {max(apart):.3g}), where rounding leaves "
            f"{self.tolerance:g}. The update was applied in part or not at all (a tied head that was not "
            "updated looks like this), or the engine computes another model than the trainer"
        )
