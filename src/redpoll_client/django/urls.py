"""`path("realtime/", include("redpoll_client.django.urls"))`: `auth`, `user-auth`, `grant` and `webhook`."""

from django.urls import path

from redpoll_client.django import views

app_name = "redpoll"
urlpatterns = [
    path("auth", views.auth, name="auth"),
    path("user-auth", views.user_auth, name="user-auth"),
    path("grant", views.grant, name="grant"),
    path("webhook", views.webhook, name="webhook"),
]
