"""Running what was trained: generation under the protocol's grammar, and what can be measured of it."""
