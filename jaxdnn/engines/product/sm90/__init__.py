"""Hopper's tensor cores: TMA and wgmma, warp-specialised."""
