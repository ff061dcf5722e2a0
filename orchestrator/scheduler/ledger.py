"""The account of one memory: who holds how much of it, and what is left.

Two ledgers are kept for a backend. The engine's counts KV cells (tokens): an account for each engine
slot, charged with the whole reservation of the turn that runs in it, or with what a paused turn or an
idle cache left there. The swap folder's counts bytes: an account for each saved file, charged before
the file is written.

What is charged is promised: :meth:`Ledger.open` and :meth:`Ledger.change` refuse what does not fit, and
the caller asks first (:attr:`Ledger.free`). An account that is opened or closed twice is a mistake in the
caller, never something to pass over: :class:`LedgerError`.
"""

from __future__ import annotations

from collections.abc import Hashable


class LedgerError(Exception):
    """The books would not balance: over the budget, below nothing, opened or closed twice."""


class Ledger:
    """Accounts by owner, in one unit."""

    __slots__ = ("_accounts", "_charged", "budget")

    def __init__(self, budget: int | None) -> None:
        """`budget` None: unlimited, when something else bounds each account."""
        if budget is not None and budget < 0:
            raise LedgerError(f"a budget of {budget} is below nothing")
        self.budget = budget
        self._accounts: dict[Hashable, int] = {}
        self._charged = 0

    @property
    def charged(self) -> int:
        """The sum of all accounts."""
        return self._charged

    @property
    def free(self) -> int | None:
        """What may still be charged; None when there is no bound."""
        return None if self.budget is None else self.budget - self._charged

    def __contains__(self, owner: Hashable) -> bool:
        """Whether `owner` has an account, be it of 0."""
        return owner in self._accounts

    def of(self, owner: Hashable) -> int:
        """What is charged to `owner`, 0 without an account."""
        return self._accounts.get(owner, 0)

    def open(self, owner: Hashable, amount: int) -> None:
        """Charge `amount` to a new account. Raises LedgerError: it exists, or the amount does not fit."""
        if owner in self._accounts:
            raise LedgerError(f"{owner} has an account already, of {self._accounts[owner]}")
        self._set(owner, 0, amount)

    def change(self, owner: Hashable, amount: int) -> None:
        """Set an account to `amount`. Raises LedgerError: there is none, or the growth does not fit."""
        if owner not in self._accounts:
            raise LedgerError(f"{owner} has no account")
        self._set(owner, self._accounts[owner], amount)

    def close(self, owner: Hashable) -> int:
        """Release an account and return what it held. Raises LedgerError when there is none."""
        if owner not in self._accounts:
            raise LedgerError(f"{owner} has no account to release")
        amount = self._accounts.pop(owner)
        self._charged -= amount
        return amount

    def _set(self, owner: Hashable, before: int, amount: int) -> None:
        if amount < 0:
            raise LedgerError(f"{owner}: {amount} is below nothing")
        charged = self._charged + amount - before
        if self.budget is not None and amount > before and charged > self.budget:
            raise LedgerError(f"{owner}: {amount} would make {charged} of a budget of {self.budget}")
        self._accounts[owner] = amount
        self._charged = charged
