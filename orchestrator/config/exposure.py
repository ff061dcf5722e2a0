"""Whether the service may listen where the configuration says: what others can reach needs keys."""

from ipaddress import ip_address

from orchestrator.config.schema import Config

MAX_NAMED = 6


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host.

    A name other than localhost is taken for one that others can reach: what it means depends on where and
    when one asks, so it is never looked up.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def exposure_problem(config: Config) -> str | None:
    """Why the service must not start, in one line that says what to do; None if it may.

    Off loopback every agent needs a key, nobody may be one without, and `/swarm/` needs a key of its own.
    """
    if is_loopback(config.server.host):
        return None
    missing = []
    keyless = [name for name, agent in config.agents.items() if agent.key is None]
    if keyless:
        named = ", ".join(keyless[:MAX_NAMED]) + (", ..." if len(keyless) > MAX_NAMED else "")
        missing.append(f"no key for {named}")
    if config.server.admin_key is None:
        missing.append("no server.admin_key")
    remedies = ["run swarm key new --all --write"] if missing else []
    if config.default_agent is not None:
        missing.append(f"default_agent ({config.default_agent}) needs none")
        remedies.append("remove default_agent")
    if not missing:
        return None
    return (
        f"server.host {config.server.host} is reachable from other machines, which takes keys, but: "
        f"{'; '.join(missing)}. Either {' and '.join(remedies)}, or set server.host to 127.0.0.1"
    )
