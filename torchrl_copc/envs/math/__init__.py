"""Mathematics with a Python interpreter."""

from torchrl_copc.envs.math.data import load_math
from torchrl_copc.envs.math.env import MathEnv
from torchrl_copc.envs.math.factory import make_math_env
from torchrl_copc.envs.math.generated import load_reasoning_gym
from torchrl_copc.envs.math.verify import AnswerVerifier, Verdict, check_gold, verify_answer

__all__ = [
    "AnswerVerifier",
    "MathEnv",
    "Verdict",
    "check_gold",
    "load_math",
    "load_reasoning_gym",
    "make_math_env",
    "verify_answer",
]
