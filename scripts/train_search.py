"""Train a search agent: vLLM rollouts, asynchronous collection, FSDP2 learner, COPC.

python scripts/train_search.py                                # experiment=search_tiny: two CPU cores
python scripts/train_search.py method=copc_wo_rc seed=1
torchrun --nproc-per-node 4 scripts/train_search.py experiment=search_llama3b
"""

from __future__ import annotations

import hydra

from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.trainer import command


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: TrainConfig) -> None:
    command(cfg)


if __name__ == "__main__":
    main()
