"""A program whose constructor loads its own weights: the whole model is there at once, in one worker after the other."""

from stagekit.hf.program import Program as HfProgram


class Program(HfProgram):
    weights = None

    def build_model(self):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, use_cache=False).train()
