"""Supervised training of the tiny models, from random weights to a Hugging Face folder.

python scripts/sft.py                              # experiment=sft_search_tiny, writes runs/sft_search_tiny
python scripts/sft.py experiment=sft_math_tiny output_dir=PATH seed=1
"""

from __future__ import annotations

import json
import logging

import hydra
from omegaconf import OmegaConf

from torchrl_copc.training.sft import SFTConfig, run


@hydra.main(version_base="1.3", config_path="../configs", config_name="sft")
def main(cfg: SFTConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = OmegaConf.to_object(cfg)
    metrics = run(config)
    print(json.dumps(metrics, indent=2))
    print(f"wrote {config.output_dir}")


if __name__ == "__main__":
    main()
