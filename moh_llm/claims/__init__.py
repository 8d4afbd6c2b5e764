"""What is said about a model: sentences that are made of typed record fields, one function a claim.

    for name, claim in claims_of(ModelRecords(config, conversion)).items():
        print(name, claim.figures, claim.text)

A claim is None where the records do not support it. Cards, reports and the last lines of commands print claims and
tables of record fields, and say nothing else about a model.
"""

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.claims.model import claims_of

__all__ = ["Claim", "ModelRecords", "claims_of"]
