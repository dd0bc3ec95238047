"""Addresses of the shop."""

from django.urls import path

from shop import views

urlpatterns = [
    path("order/<str:item>", views.order),
    path("order-for-sure/<str:item>", views.order_for_sure),
    path("receipt/<str:uuid>", views.receipt),
]
