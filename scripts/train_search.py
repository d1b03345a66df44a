"""Train a search agent: vLLM rollouts, asynchronous collection, FSDP2 learner, COPC.

python scripts/train_search.py                                # experiment=search_tiny: two CPU cores
python scripts/train_search.py method=copc_wo_rc seed=1
torchrun --nproc-per-node 4 scripts/train_search.py experiment=search_llama3b
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig

from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.trainer import USER_ERRORS, run


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: TrainConfig) -> None:
    try:
        sys.exit(run(cfg, HydraConfig.get().overrides.task))
    except USER_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
