"""Mathematics with a Python interpreter."""

from torchrl_copc.envs.math.verify import AnswerVerifier, Verdict, check_gold, verify_answer

__all__ = ["AnswerVerifier", "Verdict", "check_gold", "verify_answer"]
