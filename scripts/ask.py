"""Put a question to a trained agent and watch it work: a search agent, or a maths agent that runs code.

python scripts/ask.py "What is the capital of Kenya?"              # the agent of the newest run
python scripts/ask.py --run runs/NAME --temperature 1 "..."
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from torchrl_copc.collectors.evaluation import EvaluationRun
from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.report import transcript
from torchrl_copc.training.rollouts import start_worker
from torchrl_copc.trajectory import Prompt


def main() -> None:
    """Start the engine of a run on its trained model and print one episode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", help="the question, in words the agent was trained on")
    parser.add_argument("--run", default="runs/latest", help="run folder (default: runs/latest)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 (default) is greedy")
    options = parser.parse_args()
    run = Path(options.run)
    model = run / "model"
    if not model.is_dir():
        sys.exit(
            f"{model} is missing: --run must name the folder of a finished run (make train-search makes one)"
        )
    schema = OmegaConf.structured(TrainConfig)
    config: TrainConfig = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(run / "config.yaml")))
    print("starting the engine (half a minute on CPU)", flush=True)
    with tempfile.TemporaryDirectory() as logs:
        worker = start_worker(config, str(model), Path(logs) / "worker.log")
        try:
            rows = EvaluationRun(
                worker,
                [(Prompt("question", options.question, ()), "question")],
                temperature=options.temperature,
                seed=config.seed,
                max_concurrent_rows=1,
                row_deadline=config.collector.row_deadline,
                max_attempts=1,
            ).run()
        finally:
            worker.shutdown()
    tokenizer = AutoTokenizer.from_pretrained(model)
    print(transcript(rows[0], lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))))


if __name__ == "__main__":
    main()
