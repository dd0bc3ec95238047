"""Addresses of the shop."""

from django.urls import path

from shop import sure, views

urlpatterns = [
    path("order/<str:item>", views.order),
    path("receipt/<str:uuid>", views.receipt),
]

urlpatterns += [path("order-for-sure/<str:item>", sure.order_for_sure)]  # by the outbox
