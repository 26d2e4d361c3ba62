"""All codecs, with the fields that make another of them; small blocks and large shares, for vectors of a few elements."""

from __future__ import annotations

import paragrad as pg

TABLE = [
    pg.FP16(),
    pg.BF16(),
    pg.Int8(block=3),
    pg.Int8(),
    pg.OneBit(block=4),
    pg.OneBit(),
    pg.Threshold(0.02),
    pg.Threshold(0.02, values=False),
    pg.TopK(0.01),
    pg.TopK(0.3),
    pg.TopK(1.0),
]
