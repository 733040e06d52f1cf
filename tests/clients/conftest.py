from clients.client_exports import exports, new

__all__ = ["exports", "new"]
