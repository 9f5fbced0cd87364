"""The contract of `build_disagg_draft_input`, as tests that run on a CPU without an engine (docs/algorithms.md).

    testing.check(testing.Contract(MyAlgorithm, MY_FIELDS))

With pytest, `pytest_plugins = ["draftgather.testing"]` in the conftest.py at the root; a test that takes the argument
`contract_case` then runs once a case:

    def test_contract(contract_case):
        contract_case.check(CONTRACT)

Nothing else of the package imports this module. PYTEST_DONT_REWRITE: it has no asserts of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftgather.notices import refusals_expected
from draftgather.testing_cases import CASES, Case, run_case
from draftgather.testing_kit import NUM_SLOTS, Contract, ContractFailure, Kit, Request, random_row, ready

__all__ = [
    "CASES",
    "NUM_SLOTS",
    "Case",
    "Contract",
    "ContractFailure",
    "Request",
    "check",
    "check_case",
    "random_row",
]


def check(contract: Contract) -> dict[str, str]:
    """Run every case, on one object of the algorithm, as in an engine. The skipped ones, each with its reason.

    Raises one ContractFailure with all that failed; ValueError or TypeError for a contract that is wrong itself.
    """
    skipped, failed = {}, []
    contract = ready(contract)
    for case in CASES:
        try:
            reason = check_case(contract, case.name)
        except ContractFailure as error:
            failed.append(str(error))
        else:
            if reason is not None:
                skipped[case.name] = reason
    if failed:
        raise ContractFailure(f"{len(failed)} of {len(CASES)} cases failed\n\n" + "\n\n".join(failed))
    return skipped


def check_case(contract: Contract, name: str) -> str | None:
    """Run the case of that name. None, or the reason why it says nothing about this contract."""
    case = next((case for case in CASES if case.name == name), None)
    if case is None:
        raise ValueError(f"unknown case {name!r}, expected one of {[case.name for case in CASES]}")
    contract = ready(contract)
    with refusals_expected():
        return run_case(case, [Kit(contract, settings) for settings in contract.settings])


@dataclass(frozen=True)
class PytestCase:
    """What a test's argument `contract_case` is."""

    case: Case

    def check(self, contract: Contract) -> None:
        """As `check_case`; a case that says nothing about this contract is skipped, with the reason."""
        __tracebackhide__ = True
        reason = check_case(contract, self.case.name)
        if reason is not None:
            import pytest  # of the plug-in only: the package does not depend on it

            pytest.skip(reason)


def pytest_generate_tests(metafunc: Any) -> None:
    """pytest's hook: one run a case of each test that takes `contract_case`."""
    if "contract_case" in metafunc.fixturenames:
        names = [case.name.replace(" ", "-") for case in CASES]
        metafunc.parametrize("contract_case", [PytestCase(case) for case in CASES], ids=names)
