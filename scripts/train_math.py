"""Train a maths agent that runs Python: as train_search.py, with another environment.

python scripts/train_math.py                                  # experiment=math_tiny: two CPU cores
python scripts/train_math.py method=copc_wo_rc seed=1
torchrun --nproc-per-node 4 scripts/train_math.py experiment=math_qwen4b
"""

from __future__ import annotations

import hydra

from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.trainer import command


@hydra.main(version_base="1.3", config_path="../configs", config_name="train_math")
def main(cfg: TrainConfig) -> None:
    command(cfg)


if __name__ == "__main__":
    main()
